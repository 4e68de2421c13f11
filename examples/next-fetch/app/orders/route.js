import { intake, placeOrder } from '../../shop.js'

export const POST = intake.fetch(placeOrder)
