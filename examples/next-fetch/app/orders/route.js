import { intake, placeOrder } from '../../lib/shop.js'

export const POST = intake.fetch(placeOrder)
